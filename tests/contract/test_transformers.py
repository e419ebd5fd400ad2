"""`PyGraphTrainer` and `PyGraphTrainerCallback`: the Trainer of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from .compare import Run, same_as_plain
from .frameworks import Listed, Words, bert, forget_accelerators, sentences, train, trainer
from .models import DEVICE, adamw

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.places_its_tensors
WAYS = pytest.mark.parametrize("way", ["trainer", "callback"])


@pytest.mark.places_its_tensors
@same_as_plain(replays=12, updates=10)
def test_a_model_that_warns_once(run: Run) -> None:
    """A line of the log does not break the graph: the first step has written it."""
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes)).to(DEVICE)
    step = run.step(lambda words: model(words, labels=words).loss, model=model, optimizer=adamw(model))
    for item in sentences(16):
        step(item["input_ids"][None].to(DEVICE))


def language_model(kind: str) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, **heads, num_local_experts=4)
        )
    small = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**small, decoder_start_token_id=0))


READS_ON_CUDA = pytest.mark.skipif(
    DEVICE == "cuda", reason="experts in float32 copy their sizes to the host there: no graph holds that"
)


@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=READS_ON_CUDA), "t5"])
@pytest.mark.quick
@same_as_plain(replays=6, last_bits=DEVICE == "cuda")
def test_language_models(run: Run, kind: str) -> None:
    """Positions, masks and routes are computed in each forward."""
    torch.manual_seed(0)
    model = language_model(kind).to(DEVICE)
    step = run.step(
        lambda words: model(input_ids=words, labels=words).loss, model=model, optimizer=adamw(model)
    )
    for item in sentences(24):
        step(item["input_ids"][None].to(DEVICE))


POSITIONS: dict[str, Any] = {
    "the model's": lambda counted, shift: None,
    "counted": lambda counted, shift: counted + 3,
    "packed": lambda counted, shift: counted % 5,
    "shifted by what the step is given": lambda counted, shift: counted + shift,
    "doubled": lambda counted, shift: counted + counted,
    "one": lambda counted, shift: counted[:, :1].expand(1, 12),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.quick
@same_as_plain(replays=6)
def test_attention_has_the_kernels_of_plain_training(run: Run, positions: str) -> None:
    """A model that counts positions itself gives attention no mask, and one that is given them may have to."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(DEVICE)
    shift = 7 * (torch.arange(12, device=DEVICE) >= 5)

    def loss_of(words: torch.Tensor) -> torch.Tensor:
        where = POSITIONS[positions](torch.arange(12, device=DEVICE).unsqueeze(0), shift)
        with torch.autocast(DEVICE, torch.bfloat16):
            return model(input_ids=words, labels=words, position_ids=where).loss

    step = run.step(loss_of, model=model, optimizer=adamw(model))
    for number in range(16):
        torch.manual_seed(number)
        step(torch.randint(64, (3, 12), device=DEVICE))


# on CUDA the traced model has other kernels of attention: it cannot ask whether a mask is empty
@WAYS
@pytest.mark.quick
@same_as_plain(replays=8, last_bits=DEVICE == "cuda")
def test_a_model_of_the_library(run: Run, way: str) -> None:
    trainer(run, way, model=bert(), data=sentences(80), lr_scheduler_type="cosine", warmup_steps=3)


@WAYS
@pytest.mark.quick
@same_as_plain(replays=8, updates=3)
def test_accumulation_and_evaluation(run: Run, way: str) -> None:
    options = {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "eval_strategy": "epoch"}
    trainer(run, way, data=sentences(116), **options)


@WAYS
@pytest.mark.quick
@same_as_plain(replays=8)
def test_mixed_precision_without_clipping(run: Run, way: str) -> None:
    trainer(run, way, data=sentences(96), bf16=True, max_grad_norm=0.0)


@WAYS
@pytest.mark.quick
@same_as_plain(replays=6)
def test_padded_batches_of_many_lengths(run: Run, way: str) -> None:
    lengths = [4 + 2 * (number // 4 % 3) for number in range(160)]  # the Trainer pads within a batch
    data = [{name: t[:n] for name, t in s.items()} for s, n in zip(sentences(160), lengths, strict=True)]
    trainer(run, way, data=data, train_sampling_strategy="sequential")


@WAYS
@pytest.mark.quick
@same_as_plain(replays=8)
def test_a_data_set_without_a_length(run: Run, way: str) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(sentences(50))

    trainer(run, way, data=Stream(), max_steps=20)


@WAYS
@pytest.mark.quick
@same_as_plain(replays=8)
def test_a_trainer_with_its_own_loss_and_logs(run: Run, way: str) -> None:
    class Mine(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs["loss"] + 0.1 * outputs["logits"].square().mean()
            if self.state.global_step % 10 == 9:
                self.log({"extra": loss.item()})
            return (loss, outputs) if return_outputs else loss

    trainer(run, way, data=sentences(96), base=Mine)


@WAYS
@pytest.mark.quick
@same_as_plain(replays=8)
def test_callbacks_see_every_step(run: Run, way: str) -> None:
    called: list[Any] = []

    class Noting(transformers.TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                return lambda args, state, control, **kwargs: called.append([name, state.global_step])
            return super().__getattribute__(name)

    trainer(run, way, data=sentences(96), callbacks=[Noting()])
    run.note("called", called)


@WAYS
@pytest.mark.quick
@same_as_plain(replays=8)
def test_training_resumes_from_a_checkpoint(run: Run, way: str) -> None:
    steps = {"save_strategy": "steps", "save_steps": 10, "max_steps": 20}
    trainer(run, way, data=sentences(96), **steps)
    trainer(
        run, way, data=sentences(96), **{**steps, "max_steps": 24}, resume=str(run.folder / "checkpoint-10")
    )


@same_as_plain(replays=12, updates=0)
def test_the_compile_backend_in_a_stock_trainer(run: Run) -> None:
    forget_accelerators()
    quiet = {"use_cpu": DEVICE == "cpu", "disable_tqdm": True, "save_strategy": "no", "report_to": []}
    arguments = transformers.TrainingArguments(
        str(run.folder), max_steps=16, per_device_train_batch_size=4, **quiet
    )
    model = run.compile(Words(), in_place=True)
    train(run, transformers.Trainer(model=model, args=arguments, train_dataset=Listed(sentences())))
