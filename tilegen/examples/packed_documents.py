"""Train on packed documents: one sequence holds several, and none attends to another."""

import torch

import tilegen


class Layer(torch.nn.Module):
    """Causal attention with four query heads on two key-value heads, and a residual."""

    def __init__(self, width: int = 64, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.head_dim = heads, shared, width // heads
        self.to_q = torch.nn.Linear(width, heads * self.head_dim, bias=False)
        self.to_kv = torch.nn.Linear(width, 2 * shared * self.head_dim, bias=False)
        self.to_out = torch.nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(self, x: torch.Tensor, mask: tilegen.Mask) -> torch.Tensor:
        b, n, _ = x.shape
        q = self.to_q(x).view(b, n, self.heads, self.head_dim).transpose(1, 2)
        k, v = self.to_kv(x).view(b, n, 2 * self.shared, self.head_dim).transpose(1, 2).chunk(2, 1)
        out = tilegen.attention(q, k, v, mask=mask)
        return x + self.to_out(out.transpose(1, 2).reshape(b, n, -1))


torch.manual_seed(0)
lengths = torch.tensor([100, 28, 64, 64])  # of the documents that fill a sequence of 256 tokens
ids = torch.repeat_interleave(torch.arange(4), lengths)
mask = tilegen.causal() & tilegen.documents(ids)  # made once for all layers of a batch

layers = torch.nn.ModuleList(Layer() for _ in range(2))
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
tokens = torch.randn(1, 256, 64)
target = torch.zeros(1, 256, 64)
for step in range(5):
    x = tokens
    for layer in layers:
        x = layer(x, mask)
    loss = (x - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

alone = layers[0](tokens[:, :100], tilegen.causal())
packed = layers[0](tokens, mask)[:, :100]
print("the first document is as if alone:", torch.allclose(alone, packed, atol=1e-5))
