"""Look up each distinct list of a batch once: the same rows, of fewer ids. One process.

python examples/dedup_a_batch.py [--samples 512 --per-session 8]
"""

from __future__ import annotations

import argparse

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig

from flexshard.embeddings import DedupedEmbeddingCollection, InverseKeyedJaggedTensor
from one_line import run_example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--per-session", type=int, default=8, help="samples that share a history")
    given = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    histories = [torch.randint(1000, (20,), generator=draw).tolist() for _ in range(given.samples)]
    rows = [
        {"history": histories[n // given.per_session], "ad": [int(torch.randint(100, (1,), generator=draw))]}
        for n in range(given.samples)
    ]
    batch = InverseKeyedJaggedTensor.from_rows(rows, [["history"]])
    tables = [
        EmbeddingConfig(name=name, num_embeddings=size, embedding_dim=16, feature_names=[name])
        for name, size in (("history", 1000), ("ad", 100))
    ]
    plain = EmbeddingCollection(tables)
    collection = DedupedEmbeddingCollection(plain)  # of the same weights
    ids = sum(group.jagged.values().numel() for group in batch.groups)
    print(batch)
    print(f"{ids:,} ids of histories looked up, instead of {batch.to_keyed_jagged()['history'].values().numel():,}")
    found, expected = collection(batch), plain(batch.to_keyed_jagged())
    same = torch.equal(found["history"].expand().values(), expected["history"].values())
    print(f"rows of every sample's history: {'equal' if same else 'different'}")


if __name__ == "__main__":
    run_example(main)
