"""A program with three faults that cost time: find them with `plait report -o report.html -- python
examples/planted.py`. docs/report.md walks through the page."""

import torch


class Scores(torch.nn.Module):
    def __init__(self, n: int = 512) -> None:
        super().__init__()
        self.table = torch.randn(n, n).t()
        self.weight = torch.nn.Parameter(torch.randn(n, n))
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = torch.nn.functional.layer_norm(x + self.table, x.shape[-1:])
        scores = moved @ self.weight
        print("scores are there")
        return (scores / self.temperature).softmax(-1)


def main() -> None:
    model = Scores()
    compiled = torch.compile(model, backend="plait")
    with torch.no_grad():
        for step in range(3):
            model.temperature = 1.0 + step
            compiled(torch.randn(512, 512))


if __name__ == "__main__":
    main()
