"""Runs in an interpreter that has dm-reverb: reads one JSON request a line, answers when the work is done."""

from __future__ import annotations

import json
import sys

import numpy as np
import reverb
import tensorflow as tf


class Table:
    """A server with one table, filled, its data set and its writer."""

    def __init__(self, fields, capacity, batch, prioritized):
        self.batch = batch
        signature = {name: tf.TensorSpec([1, *shape], dtype) for name, (shape, dtype) in fields.items()}
        selector = reverb.selectors.Prioritized(0.6) if prioritized else reverb.selectors.Uniform()
        table = reverb.Table(
            name="t",
            sampler=selector,
            remover=reverb.selectors.Fifo(),
            max_size=capacity,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=signature,
        )
        self.server = reverb.Server([table])
        address = f"localhost:{self.server.port}"
        self.client = reverb.Client(address)
        self.writer = self.client.trajectory_writer(num_keep_alive_refs=1)
        generator = np.random.default_rng(0)
        self.step = {name: (generator.random(shape) * 255).astype(dtype) for name, (shape, dtype) in fields.items()}
        self.add(capacity)
        dataset = reverb.TrajectoryDataset.from_table_signature(
            server_address=address, table="t", max_in_flight_samples_per_worker=2 * batch
        )
        self.draws = iter(dataset.batch(batch).prefetch(1))
        self.priorities = generator.lognormal(0.0, 1.0, batch)

    def add(self, rows):
        for _ in range(rows):
            self.writer.append(self.step)
            self.writer.create_item("t", 1.0, {name: column[-1:] for name, column in self.writer.history.items()})
        self.writer.flush()

    def sample(self, batches):
        return [next(self.draws) for _ in range(batches)]

    def sample_and_update(self, batches):
        for drawn in self.sample(batches):
            keys = drawn.info.key.numpy().reshape(self.batch, -1)[:, 0]
            self.client.mutate_priorities("t", dict(zip(keys.tolist(), self.priorities.tolist(), strict=True)))


def main():
    table = Table(**json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        what, calls = getattr(table, request.pop("do")), request.pop("calls")
        for _ in range(calls):
            what(request["count"])
        print("done", flush=True)


if __name__ == "__main__":
    main()
