"""The user's own Accelerate loop, with and without the plugin: the same numbers, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")

from accelerate.utils import (  # noqa: E402
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_training import (  # noqa: E402
    NEVER,
    Numbers,
    Script,
    both,
    fresh,  # noqa: F401
    fresh_state,
    loss_of,
    run,
    setup,
)
from training import Net  # noqa: E402

from pygraph_train import Accelerator, PyGraph, PyGraphError  # noqa: E402
from pygraph_train.integrations.accelerate import route_step  # noqa: E402
from pygraph_train.torch_internals import compiled_call  # noqa: E402


def train(script: Script, *, clip: str | None = None, epochs: int = 1, **options: Any) -> None:
    """The loop of Accelerate's documentation."""
    accelerator = script.accelerator
    model, optimizer, loader, schedule = setup(script, **options)
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip == "norm":
                    script.write("norm", accelerator.clip_grad_norm_(model.parameters(), 0.5))
                if accelerator.sync_gradients and clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            script.write("loss", loss)
            script.write("rate", schedule.get_last_lr())
    script.write_state(model, optimizer)


def replayed(report: Any, least: int = 20) -> None:
    assert report.steps_replayed >= least, str(report)
    assert report.present_plan() == "{F} {B} {O}", str(report)


def test_plain_loop() -> None:
    replayed(both(train))


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping(clip: str) -> None:
    replayed(both(lambda script: train(script, clip=clip)))


def test_bf16_with_outputs_converted_to_fp32() -> None:
    # AOTAutograd may fuse casts: compare with the same graphs of operations, run without CUDA graphs
    replayed(both(train, compiled_reference=True, mixed_precision="bf16"))


def test_accumulation_with_a_ragged_last_batch() -> None:
    # 240 = 34 * 7 + 2: the last batch is smaller, and the last group has fewer than 4 micro-batches
    report = both(lambda script: train(script, batch=7, epochs=2), gradient_accumulation_steps=4)
    assert sum(region.replays for region in report.regions()) > 40, str(report)


def test_a_ragged_last_batch() -> None:
    report = both(lambda script: train(script, batch=7, epochs=2))
    assert report.steps_replayed > 30, str(report)


def test_two_models_and_two_optimizers() -> None:
    def gan(script: Script) -> None:
        accelerator = script.accelerator
        generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        critic = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        makes = torch.optim.AdamW(generator.parameters(), lr=1e-3, fused=True)
        judges = torch.optim.AdamW(critic.parameters(), lr=1e-3, fused=True)
        loader = DataLoader(Numbers(240), batch_size=8)
        generator, critic, makes, judges, loader = accelerator.prepare(
            generator, critic, makes, judges, loader
        )
        for batch in loader:
            real, noise = batch["x"], torch.randn(8, 4)
            judged = nn.functional.softplus(-critic(real)).mean()
            judged = judged + nn.functional.softplus(critic(generator(noise).detach())).mean()
            judges.zero_grad()
            accelerator.backward(judged)
            judges.step()
            made = nn.functional.softplus(-critic(generator(noise))).mean()
            makes.zero_grad()
            accelerator.backward(made)
            makes.step()
            script.write("losses", [judged, made])
        script.write_state(generator, makes)
        script.write_state(critic, judges)

    report = both(gan)
    assert sum(region.replays for region in report.regions()) > 60, str(report)
    assert report.optimizer_steps_replayed > 20, str(report)


def test_state_saved_and_loaded_in_mid_epoch(tmp_path: Path) -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, schedule = setup(script)
        folder = str(tmp_path / type(accelerator).__module__)

        def steps(batches: Any) -> None:
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                script.write("loss", loss)

        batches = list(loader)
        steps(batches[:15])
        accelerator.save_state(folder)
        steps(batches[15:])
        accelerator.load_state(folder)
        steps(accelerator.skip_first_batches(loader, 15))
        script.write_state(model, optimizer)

    assert both(script).steps_replayed > 20


def test_evaluation_between_epochs() -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, schedule = setup(script)
        held_out = accelerator.prepare(DataLoader(Numbers(20), batch_size=8))
        for _ in range(3):
            model.train()
            for batch in loader:
                optimizer.zero_grad()
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                schedule.step()
            model.eval()
            for batch in held_out:
                with torch.no_grad():
                    guesses = model(batch["x"])
                script.write("gathered", accelerator.gather_for_metrics((guesses, batch["y"])))
        script.write_state(model, optimizer)

    report = both(script)
    assert report.steps_replayed > 70, str(report)
    assert not any(region.phase == "inference" for region in report.regions())


def test_gradients_read_and_changed_before_the_step() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        for batch in loader:
            optimizer.zero_grad()
            script.accelerator.backward(loss_of(model, batch))
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)
            optimizer.step()
            script.write("gradients", [p.grad for p in model.parameters()])
        script.write_state(model, optimizer)

    replayed(both(script))


def test_parameters_that_move_in_mid_run() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        for index, batch in enumerate(loader):
            if index in (15, 16, 25):
                for p in model.parameters():
                    p.data = p.data.clone()
            optimizer.zero_grad()
            script.accelerator.backward(loss_of(model, batch))
            optimizer.step()
            script.write("parameters", list(model.parameters()))

    assert both(script).optimizer_steps_replayed > 5


def test_gradients_in_fixed_memory_that_are_zeroed() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        for batch in loader:
            optimizer.zero_grad(set_to_none=False)
            script.accelerator.backward(loss_of(model, batch))
            optimizer.step()
        script.write_state(model, optimizer)

    assert both(script).optimizer_steps_replayed > 5


def test_layers_frozen_for_a_while() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        for index, batch in enumerate(loader):
            model.first.requires_grad_(not 10 <= index < 20)
            optimizer.zero_grad()
            script.accelerator.backward(loss_of(model, batch))
            optimizer.step()
            script.write("parameters", list(model.parameters()))

    assert both(script).optimizer_steps_replayed > 5


def test_gradients_kept_by_the_user_keep_their_values() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        kept = []
        for batch in loader:
            optimizer.zero_grad()
            script.accelerator.backward(loss_of(model, batch))
            kept.append([p.grad for p in model.parameters()])
            optimizer.step()
        script.write("kept", kept)
        script.write_state(model, optimizer)

    assert both(script).steps == 30


def test_optimizer_that_reads_the_host_stays_outside_and_the_report_says_so() -> None:
    def script(script: Script) -> None:
        model, loader = script.accelerator.prepare(Net(), DataLoader(Numbers(), batch_size=8))
        optimizer = script.accelerator.prepare(torch.optim.Adam(model.parameters(), lr=1e-2))
        for batch in loader:
            optimizer.zero_grad()
            script.accelerator.backward(loss_of(model, batch))
            optimizer.step()
        script.write_state(model, optimizer)

    report = both(script)
    assert report.present_plan() == "{F} {B} O"
    (fallback,) = report.fallbacks
    assert "reads the step count on the host" in fallback.reason or "read the step count" in fallback.reason


def test_unwrap_model_gives_the_users_module() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", plugins=[PyGraph(engine="emulated")])
    model = Net()
    prepared = accelerator.prepare(model)
    assert prepared is model and accelerator.unwrap_model(prepared) is model
    assert list(accelerator.get_state_dict(prepared)) == list(model.state_dict())
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    pickle.dumps(plain)
    copy.deepcopy(plain)


def test_everything_is_given_back(tmp_path: Path) -> None:
    def before_and_after(end: Any) -> None:
        accelerator = Accelerator(cpu=True, plugins=[PyGraph(engine="emulated", warmup_steps=2)])
        script = Script(accelerator)
        model, optimizer, loader, _ = setup(script)
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
        inner, attributes = optimizer.optimizer, set(vars(optimizer))
        assert compiled_call(model) is not None
        end(accelerator)
        assert compiled_call(model) is None and "_compiled_call_impl" not in vars(model)
        assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer
        assert set(vars(optimizer)) == attributes - {"_pygraph_run"}
        assert all(type(group["lr"]) is float for group in inner.param_groups)
        optimizer.step()
        report = accelerator.pygraph.report()
        assert report.steps == 30 and "{F} {B} {O}" in str(report)

    before_and_after(lambda accelerator: accelerator.free_memory())
    torch.compiler.reset()
    before_and_after(lambda accelerator: accelerator.end_training())


def test_attach_takes_over_what_is_prepared_and_detach_gives_it_back() -> None:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        model, optimizer, loader, schedule = setup(script)
        plugin = PyGraph(engine="emulated", warmup_steps=2)
        cls = type(accelerator)
        attached = cls is accelerate.Accelerator and script is graphed
        if attached:
            assert plugin.attach(accelerator) is accelerator
            assert isinstance(accelerator, Accelerator) and accelerator.pygraph is plugin
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            schedule.step()
        script.write_state(model, optimizer)
        if attached:
            replayed(plugin.report())
            plugin.detach()
            assert type(accelerator) is cls and "_pygraph" not in vars(accelerator)
            assert compiled_call(model) is None

    entries = []
    for wanted in (False, True):
        with fresh_state():
            torch.manual_seed(0)
            made = Script(accelerate.Accelerator(cpu=True))
            graphed = made if wanted else None
            script(made)
            entries.append(made.entries)
    assert repr(entries[0]) == repr(entries[1])


def test_plugins_reach_their_arguments(tmp_path: Path) -> None:
    handler = GradScalerKwargs(growth_interval=7)
    accelerator = Accelerator(
        cpu=True,
        plugins=[
            PyGraph(engine="emulated"),
            GradientAccumulationPlugin(num_steps=3),
            DataLoaderConfiguration(split_batches=True),
            ProjectConfiguration(project_dir=str(tmp_path)),
            TorchDynamoPlugin(backend="eager"),
            handler,
        ],
    )
    assert isinstance(accelerator, accelerate.Accelerator)
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.split_batches
    assert accelerator.project_dir == str(tmp_path)
    assert accelerator.scaler_handler is handler
    assert accelerator.state.dynamo_plugin.backend == "EAGER"


def test_wrong_plugins_are_named() -> None:
    with pytest.raises(TypeError, match=r"plugins takes instances of PyGraph, DeepSpeedPlugin.*got 3"):
        Accelerator(cpu=True, plugins=[3])
    with pytest.raises(ValueError, match="two PyGraph"):
        Accelerator(cpu=True, plugins=[PyGraph(), PyGraph()])
    with pytest.raises(ValueError, match="gradient_accumulation_plugin was given twice"):
        Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
            plugins=[GradientAccumulationPlugin(num_steps=3)],
        )
    with pytest.raises(TypeError, match="no option 'engin'"):
        PyGraph(engin="cuda")
    plugin = PyGraph()
    with pytest.raises(TypeError, match="attach takes an accelerate"):
        plugin.attach(3)  # type: ignore[arg-type]


def test_without_a_pygraph_it_is_the_stock_class() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.pygraph is None
    model = accelerator.prepare(Net())
    assert compiled_call(model) is None
    with pytest.raises(RuntimeError, match="graphed_step needs a PyGraph"):
        accelerator.graphed_step(lambda: None)


def test_cuda_engine_without_cuda_is_refused_at_once() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        Accelerator(cpu=True, plugins=[PyGraph(engine="cuda")])


def test_disabled_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_DISABLE", "1")
    report = both(train)
    assert report.steps_replayed == 0 and not report.regions()
    assert "graphs are off" in str(report)


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_phases_that_are_off_stay_off(phase: str) -> None:
    plugin = PyGraph(engine="emulated", warmup_steps=2, **{phase: "off"})
    run(train, plugin)
    expected = {"forward": "F {B} {O}", "backward": "{F} B {O}", "optimizer": "{F} {B} O"}
    assert plugin.report().present_plan() == expected[phase], str(plugin.report())


def test_forward_and_backward_off() -> None:
    plugin = PyGraph(engine="emulated", warmup_steps=2, forward="off", backward="off")
    run(train, plugin)
    assert plugin.report().present_plan() == "F B {O}", str(plugin.report())
    assert not plugin.report().regions() and "forward='off', backward='off'" in str(plugin.report())


def test_inductor_of_the_user_becomes_ours_and_other_compilers_stay() -> None:
    plugin = PyGraph(engine="emulated", warmup_steps=2)
    run(train, plugin, dynamo_backend="inductor")
    replayed(plugin.report())
    plugin = PyGraph(engine="emulated", warmup_steps=2)
    run(train, plugin, dynamo_backend="eager")
    assert plugin.report().present_plan() == "F B {O}"
    assert "compiles models with eager" in str(plugin.report())


def test_a_model_compiled_by_the_user_is_left_to_that() -> None:
    plugin = PyGraph(engine="emulated", warmup_steps=2, on_failure="fallback")
    accelerator = Accelerator(cpu=True, plugins=[plugin])
    accelerator.prepare(torch.compile(Net(), backend="eager"))
    assert "is compiled already" in str(plugin.report())


def test_trackers_get_the_values() -> None:
    logged: list[dict[str, Any]] = []

    class Tracker(accelerate.tracking.GeneralTracker):
        name = "list"
        requires_logging_directory = False

        @property
        def tracker(self) -> Any:
            return self

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            logged.append(values)

    def script(script: Script) -> None:
        accelerator = script.accelerator
        accelerator.init_trackers("test")
        model, optimizer, loader, _ = setup(script)
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            accelerator.log({"step": step}, step=step)

    run(script, PyGraph(engine="emulated", warmup_steps=2), log_with=Tracker())
    assert [values["step"] for values in logged] == list(range(30))
    assert logged[-1]["pygraph/replayed"] > 0.6 and logged[-1]["pygraph/step_ms"] > 0
    assert any(values.get("pygraph/plan") == "{F} {B} {O}" for values in logged)


def test_on_failure_raise_raises() -> None:
    plugin = PyGraph(engine="emulated", warmup_steps=2, on_failure="raise")
    accelerator = Accelerator(cpu=True, plugins=[plugin])
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(8, 6)).sum())
    with pytest.raises(PyGraphError, match="outside of graphs"):
        optimizer.step()


def test_accelerator_and_optimizer_can_be_pickled() -> None:
    accelerator = Accelerator(cpu=True, plugins=[PyGraph(engine="emulated")])
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert type(pickle.loads(pickle.dumps(optimizer))) is accelerate.optimizer.AcceleratedOptimizer
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.pygraph.config == accelerator.pygraph.config


def test_never_in_a_graph_is_what_the_reference_runs() -> None:
    plugin = PyGraph(engine="emulated", warmup_steps=NEVER)
    run(train, plugin)
    assert plugin.report().regions() and not any(r.replays for r in plugin.report().regions())


def test_import_needs_neither_accelerate_nor_transformers() -> None:
    program = (
        "import sys, pygraph_train, pygraph_train.integrations.loop\n"
        "assert not {'accelerate', 'transformers', 'lightning'} & set(sys.modules)\n"
        "sys.modules['accelerate'] = sys.modules['transformers'] = None\n"
        "for name in ('Accelerator', 'PyGraph', 'PyGraphTrainer', 'PyGraphTrainerCallback'):\n"
        "    try:\n"
        "        getattr(pygraph_train, name)\n"
        "    except ImportError as error:\n"
        "        assert 'pip install' in str(error) and 'pygraph-train[' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(name)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_sparse_gradients_that_begin_late() -> None:
    def script(script: Script) -> None:
        class Words(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words = nn.Embedding(12, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.words(x).sum()

        words = Words()
        optimizer = torch.optim.SGD(words.parameters(), lr=1e-2, fused=True)
        model, optimizer = script.accelerator.prepare(words, optimizer)
        for index in range(12):
            words.words.sparse = index > 8
            optimizer.zero_grad()
            script.accelerator.backward(model(torch.arange(index % 3, 8)))
            with contextlib.suppress(RuntimeError):  # fused SGD takes no sparse gradients
                optimizer.step()
            script.write("parameters", list(model.parameters()))

    both(script)


def test_with_a_scaler_accelerate_leaves_nothing_on_the_optimizer() -> None:
    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    accelerate.Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(inner, scaler=scaler)
    steps: list[Any] = []
    undo = route_step(optimizer, steps.append)
    optimizer.step()
    assert len(steps) == 1
    model(torch.randn(8, 6)).sum().backward()
    steps[0]()
    assert "step" not in vars(inner)
    undo()
    assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer
