"""What a host ingestion hook holds: its carry, and the records it has made that are not inserted yet."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax

from conduit_jax.checkpoint.arrays import Reader, Writer
from conduit_jax.checkpoint.leaves import filled, kept, load_tree, save_tree, spec_of
from conduit_jax.checkpoint.pipelines import finished
from conduit_jax.checkpoint.structure import differences
from conduit_jax.errors import ConfigError, refuse
from conduit_jax.schedule.host import HostIngestion

Data = dict[str, Any]


def save_host(writer: Writer, ingestion: HostIngestion) -> Data:
    """Wait for the hook's calls and write what came of them. The caller holds its lock."""
    units = []
    for pending, context, version in ingestion._pending:
        records = pending.result(ingestion.deadline_s)
        if not pending.dropped and ingestion.queue.order == "program":  # in order of arrival they insert themselves
            leaves = [writer.put(leaf) for leaf in jax.tree.leaves(records)]
            units.append({"records": leaves, "context": save_tree(writer, context), "version": version})
    return {"carry": kept(writer, ingestion._carry), "units": units}


class HostLoader:
    """Restores a host hook in two steps, as ``ReplayLoader`` does; ``records`` is the tree of one unit's."""

    def __init__(self, reader: Reader, saved: Data, ingestion: HostIngestion, records: Any, context: Any):
        lines = differences(saved["carry"]["spec"], spec_of(ingestion._carry), "carry")
        if lines:
            refuse(ConfigError, "The checkpoint holds another carry of a host hook.", got="; ".join(lines))
        self._ingestion, self._reader, self._saved = ingestion, reader, saved
        self._units = [
            (
                records.unflatten([reader.get(leaf) for leaf in one["records"]]),
                load_tree(reader, one["context"], lambda: jax.tree.structure(context)),
                one["version"],
            )
            for one in saved["units"]
        ]

    def commit(self) -> None:
        """Put everything in its place; the unit that told what records look like is run again, with the carry that was saved."""
        ingestion = self._ingestion
        ingestion._carry = filled(self._reader, self._saved["carry"]["leaves"], ingestion._carry)
        ingestion._first = None
        ingestion._pending = deque((finished(records), context, version) for records, context, version in self._units)
