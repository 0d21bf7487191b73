"""Models with tensor trains under ``torch.compile``: the same numbers, one break of the graph per table."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
from torch import nn

from flexshard.embeddings import TTEmbedding, TTEmbeddingBag


class Model(nn.Module):
    def __init__(self, optimizer: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        how: dict[str, Any] = {} if optimizer is None else {"optimizer": optimizer, "learning_rate": 0.05}
        self.bags = TTEmbeddingBag(5000, 16, tt_ranks=8, mode="sum", hot_rows=10, **how)
        self.rows = TTEmbedding(3000, 8, tt_ranks=4, **how)
        self.over = nn.Linear(24, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        pooled, first = self.bags(ids, offsets), self.rows(ids[: offsets.numel()] % 3000)
        return self.over(torch.cat([pooled, first], 1).tanh()).squeeze(1)


@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_compiled_models_train_to_the_same_weights(optimizer: str | None) -> None:
    torch._dynamo.reset()
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain, ours = Model(optimizer), Model(optimizer)
    compiled = torch.compile(ours, backend=keep)
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    for step, number in enumerate((4096, 4096, 512)):
        ids = torch.randint(0, 5000, (number,), generator=torch.Generator().manual_seed(step))
        offsets = torch.arange(0, number, 8)
        if step == 1:
            plain.bags.pin_rows(torch.arange(10))
            ours.bags.pin_rows(torch.arange(10))
        expected, found = plain(ids, offsets), compiled(ids, offsets)
        assert torch.equal(expected, found)
        for loss, optim in zip((expected, found), steps, strict=True):
            optim.zero_grad()
            loss.square().sum().backward()
            optim.step()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)
    operations = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert any("linear" in operation for operation in operations)  # the rest of the model was compiled
    assert not any("embedding" in operation for operation in operations)


def test_a_table_alone_is_compiled_to_itself() -> None:
    table = TTEmbeddingBag(1000, 8, tt_ranks=4)
    ids, offsets = torch.arange(20), torch.tensor([0, 5])
    assert torch.equal(torch.compile(table, backend="eager")(ids, offsets), table(ids, offsets))
