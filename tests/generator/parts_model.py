"""Blocks of a model: each takes the hidden activation `h` of shape (rows, 8) and leaves one of that shape."""

from __future__ import annotations

from .part import Part, by_name

__all__ = ["BLOCKS"]

BLOCKS = by_name(
    Part("linear", init="self.linear = nn.Linear(8, 8)", forward="h = torch.relu(self.linear(h))"),
    Part("batchnorm", init="self.norm = nn.BatchNorm1d(8)", forward="h = self.norm(h)", weight=2),
    Part("dropout", init="self.dropout = nn.Dropout(0.3)", forward="h = self.dropout(h)", weight=2),
    Part("layernorm", init="self.layernorm = nn.LayerNorm(8)", forward="h = F.gelu(self.layernorm(h))"),
    Part(
        "conv",
        init="self.conv, self.conv_norm = nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2)",
        forward="h = self.conv_norm(self.conv(h.view(-1, 2, 4))).flatten(1).relu()",
    ),
    Part(
        "attention",
        init="self.qkv = nn.Linear(4, 12)",
        forward="""
q, k, v = self.qkv(h.view(-1, 2, 4)).chunk(3, -1)
h = h + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True).flatten(1)
""",
        weight=2,
    ),
    Part(
        "multihead",
        init="self.multihead = nn.MultiheadAttention(4, 2, batch_first=True)",
        forward="h = h + self.multihead(h.view(-1, 2, 4), h.view(-1, 2, 4), h.view(-1, 2, 4))[0].flatten(1)",
    ),
    Part(
        "embedding",
        init="self.embedding = nn.Embedding(5, 8)",
        forward="h = h + self.embedding((x[:, 0] > 0).long())",
    ),
    Part(
        "embedding_max_norm",
        init="self.normed_embedding = nn.Embedding(5, 8, max_norm=1.0)",
        forward="h = h + self.normed_embedding((x[:, 0] > 0).long())",
    ),
    Part(
        "embedding_padding",
        init="self.padded_embedding = nn.Embedding(5, 8, padding_idx=0)",
        forward="h = h + self.padded_embedding((x[:, :2] > 0).long()).sum(1)",
    ),
    Part(
        "embedding_bag",
        init="self.bag = nn.EmbeddingBag(5, 8, mode='mean')",
        forward="h = h + self.bag((x[:, :3] > 0).long())",
    ),
    Part(
        "tied",
        init="""
self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
self.down.weight = self.up.weight
""",
        forward="h = self.down(torch.tanh(self.up(h)))",
    ),
    Part("lazy", init="self.lazy = nn.LazyLinear(8)", forward="h = torch.tanh(self.lazy(h))", weight=0.5),
    Part(
        "lstm_cell",
        init="self.cell = nn.LSTMCell(8, 8)",
        forward="h = self.cell(h)[0]",
    ),
    Part(
        "gru",
        init="self.gru = nn.GRU(4, 4, batch_first=True)",
        forward="h = self.gru(h.view(-1, 2, 4))[0].flatten(1)",
        weight=0.5,
    ),
    Part(
        "frozen",
        init="self.frozen = nn.Linear(8, 8).requires_grad_(False)",
        forward="h = h + self.frozen(h).tanh()",
    ),
    Part(
        "no_grad_part",
        init="self.quiet = nn.Linear(8, 8)",
        forward="""
with torch.no_grad():
    noise = self.quiet(h).sigmoid()
h = h * noise
""",
    ),
    Part(
        "unused",
        init="self.unused = nn.Linear(8, 8)",
    ),
    Part(
        "buffer_in_place",
        init="self.register_buffer('mean', torch.zeros(8))",
        forward="""
if self.training:
    with torch.no_grad():
        self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
h = h - self.mean
""",
    ),
    Part(
        "buffer_replaced",
        init="self.register_buffer('running', torch.zeros(8))",
        forward="""
self.running = 0.9 * self.running + 0.1 * h.detach().mean(0)
h = h - self.running
""",
    ),
    Part(
        "buffer_data",
        init="self.register_buffer('average', torch.zeros(8))",
        forward="""
self.average.data = 0.9 * self.average + 0.1 * h.detach().mean(0)
h = h - self.average
""",
    ),
    Part(
        "buffer_copy",
        init="self.register_buffer('before', torch.zeros(8), persistent=False)",
        forward="""
h = h + 0.1 * self.before
with torch.no_grad():
    self.before.copy_(h[0])
""",
    ),
    Part("attribute", init="self.scale = 0.7", forward="h = h * self.scale"),
    Part(
        "attribute_list",
        init="self.powers = [1, 2]",
        forward="""
for n in self.powers:
    h = h + 0.1 * h**n
""",
    ),
    Part("attribute_numpy", init="self.shift = np.float32(0.1)", forward="h = h - self.shift"),
    Part("attribute_tensor", init="self.factor = torch.linspace(0.5, 1.5, 8)", forward="h = h * self.factor"),
    Part(
        "attribute_class",
        module="""
class Settings:
    gain = 1.3
    def __init__(self):
        self.bias = 0.2
""",
        init="self.settings = Settings()",
        forward="h = h * self.settings.gain + self.settings.bias",
    ),
    Part(
        "counter",
        init="self.calls = 0",
        forward="""
self.calls += 1
if self.calls % 5 == 0:
    h = h * 0.5
""",
        weight=0.5,
    ),
    Part(
        "counter_of_training",
        init="self.seen = 0",
        forward="""
if self.training:
    self.seen += 1
""",
        weight=0.5,
    ),
    Part(
        "layer_drop",
        init="self.sometimes = nn.Linear(8, 8)",
        forward="""
if not self.training or random.random() > 0.3:
    h = h + self.sometimes(h).tanh()
""",
        weight=0.5,
    ),
    Part(
        "layer_drop_torch",
        init="self.often = nn.Linear(8, 8)",
        forward="""
if not self.training or torch.rand([]) > 0.3:
    h = h + self.often(h).tanh()
""",
        weight=0.5,
    ),
    Part(
        "module_list",
        init="self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))",
        forward="""
for layer in self.layers:
    h = h + layer(h).tanh()
""",
    ),
    Part(
        "parameter_list",
        init="self.gains = nn.ParameterList(torch.ones(8) for _ in range(2))",
        forward="""
for gain in self.gains:
    h = h * gain
""",
    ),
    Part(
        "parametrized",
        init="self.para = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))",
        forward="h = h + self.para(h)",
        weight=0.5,
    ),
    Part(
        "spectral_norm",
        init="self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))",
        forward="h = h + self.spectral(h)",
        weight=0.5,
    ),
    Part(
        "cached_tensor",
        init="self.cache = None",
        forward="""
if self.cache is None:
    self.cache = torch.linspace(-1, 1, 8)
h = h + self.cache
""",
        weight=0.5,
    ),
    Part(
        "custom_function",
        module="""
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2 + 0.0 * ctx.saved_tensors[0]
""",
        forward="h = Double.apply(h)",
    ),
    Part(
        "scalar_parameter",
        init="self.temper = nn.Parameter(torch.tensor(1.5))",
        forward="h = h * self.temper",
    ),
    Part(
        "checkpointed",
        init="self.heavy = nn.Linear(8, 8)",
        forward="h = checkpoint(lambda a: torch.tanh(self.heavy(a)), h, use_reentrant=False)",
    ),
    Part(
        "checkpointed_dropout",
        init="self.heavy_drop = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))",
        forward="h = checkpoint(self.heavy_drop, h, use_reentrant=False)",
        weight=0.5,
    ),
    Part(
        "checkpointed_reentrant",
        init="self.heavy_again = nn.Linear(8, 8)",
        forward="h = checkpoint(self.heavy_again, h, use_reentrant=True)",
        weight=0.3,
    ),
    Part(
        "mask",
        init="self.masked = nn.Linear(8, 8)",
        forward="""
h = h.masked_fill(h > 1, 0.5)
h = self.masked(h)
""",
    ),
    Part("noise", forward="h = h + 0.1 * torch.randn_like(h)"),
    Part("bernoulli", forward="h = h * torch.bernoulli(torch.full_like(h, 0.8))"),
    Part(
        "host_read",
        forward="""
if h.abs().max().item() > 100:
    h = h / 10
""",
        weight=0.5,
    ),
)
