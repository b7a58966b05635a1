"""``conduit-jax plan`` and ``profile``: the placement decision for a topology given as data, and this machine's as data."""

from __future__ import annotations

import json
import re
from typing import Any

import click

from conduit_jax.cli.suggest import SuggestingChoice
from conduit_jax.errors import ConfigError, refuse

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


class Amount(click.ParamType):
    """A whole number, with K, M, G, T (thousands) or Ki, Mi, Gi, Ti behind it if liked: ``48K``, ``1e6``, ``64Gi``."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(
            r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([KMGT]?i?)B?", str(value).strip(), re.IGNORECASE
        )
        if found is None or found[2].upper() not in _UNITS:
            self.fail(f"{value!r} is no amount: write 48000, 48K or 64Gi", param, ctx)
        number = float(found[1]) * _UNITS[found[2].upper()]
        if number != int(number) or not 1 <= number < 1e18:
            self.fail(f"{value!r} is not a whole number from 1 to 10**18", param, ctx)
        return int(number)


AMOUNT = Amount()


@click.command("plan")
@click.option(
    "--topology",
    required=True,
    metavar="NAME|FILE",
    help="A shipped topology (--list), a JSON file, or here: this machine's profile.",
)
@click.option("--item", type=AMOUNT, metavar="BYTES", help="Bytes of one stored item: 48000, 48K.")
@click.option(
    "--leaf",
    "leaves",
    multiple=True,
    metavar="NAME=BYTES",
    help="A leaf of an item, in place of --item: leaves may live in different memories. image=28K, small=64.",
)
@click.option("--capacity", type=AMOUNT, required=True, metavar="N", help="Items the replay holds: 1000000, 1M.")
@click.option(
    "--actors",
    type=SuggestingChoice(["host", "device"]),
    default="host",
    show_default=True,
    help="Where rollouts are made.",
)
@click.option("--inserts", type=AMOUNT, default=512, show_default=True, metavar="N", help="Items an iteration inserts.")
@click.option(
    "--samples",
    type=AMOUNT,
    default=512,
    show_default=True,
    metavar="N",
    help="Items an iteration samples, over all learners.",
)
@click.option(
    "--learners",
    default="0",
    show_default=True,
    metavar="RANKS",
    help="Devices that consume batches: 0, 0,2,5, 0-7 or all.",
)
@click.option(
    "--local-read-fraction",
    type=click.FloatRange(0, 1),
    help="Share of a learner's items on its own device: 1 for draws local to a data-parallel learner.  [default: by the shares, 1/n]",
)
@click.option("--partitions", type=click.IntRange(min=1), help="Partitions of the replay.  [default: one a holder]")
@click.option(
    "--only",
    multiple=True,
    metavar="CANDIDATE",
    help="Choose from these: pageable, pinned_host, single_device, shared, shared:4, device, disk.",
)
@click.option(
    "--limit", multiple=True, metavar="TIER=BYTES", help="At most so many bytes a device or host tier: pinned_host=16G."
)
@click.option(
    "--grow",
    type=AMOUNT,
    metavar="BYTES",
    help="Also print where the replay would live as its items grow, up to so many bytes an item. Minutes for a hundred nodes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option(
    "--list",
    "show_list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda *words: _list(*words),
    help="List the shipped topologies and exit.",
)
def plan_placement(
    topology: str, only: tuple[str, ...], limit: tuple[str, ...], grow: int | None, as_json: bool, **chosen: Any
) -> None:
    """Decide where a replay would live on a system, what an iteration's traffic would cost, and why not elsewhere."""
    from conduit_jax.sharding.ahead import plan_ahead
    from conduit_jax.sharding.planner import plan
    from conduit_jax.sharding.topology import load_topology
    from conduit_jax.sharding.workload import Workload

    system = (_this_machine() if topology == "here" else load_topology(topology)).limited(limits_of(limit))
    leaves = leaves_of(chosen["leaves"], chosen["item"])
    workload = Workload(
        item_bytes=chosen["item"] or sum(leaves.values()),
        capacity_items=chosen["capacity"],
        inserted_items=chosen["inserts"],
        sampled_items=chosen["samples"],
        actors=chosen["actors"],
        learners=ranks_of(chosen["learners"], system.devices * system.nodes),
        local_read_fraction=chosen["local_read_fraction"],
        partitions=chosen["partitions"],
        leaves=leaves,
    )
    decided = plan(system, workload, only=only)
    ahead = None if grow is None else plan_ahead(system, workload, grow, only=only)
    if as_json:
        click.echo(json.dumps(decided.as_dict() | ({} if ahead is None else {"map": ahead.as_dict()}), indent=1))
        return
    click.echo(str(decided))
    if ahead is not None:
        alone = "no one memory holds it: leaves are split, or the disk is taken" if len(leaves) > 1 else "nothing fits"
        click.echo("\n".join(["  as items grow", *(f"  {line}" for line in ahead.lines(alone))]))


@click.command("profile")
@click.option("--json", "as_json", is_flag=True, help="Print the topology as JSON: a file for plan --topology.")
@click.option("--refresh", is_flag=True, help="Measure again, also where a profile of this machine is kept.")
@click.option("--quiet", is_flag=True, help="Print nothing; only keep the profile.")
@click.option(
    "--distributed", is_flag=True, help="Measure the network too, in a cluster JAX knows; run by all processes."
)
@click.option("--coordinator", metavar="HOST:PORT", help="The same elsewhere: where process 0 listens.")
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="The same: how many there are.")
@click.option("--process", type=click.IntRange(min=0), metavar="I", help="The same: which one this is.")
def profile_machine(
    as_json: bool,
    refresh: bool,
    quiet: bool,
    distributed: bool,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
) -> None:
    """Measure this machine's links and memory with device_put, and keep the result on disk.

    Links to other processes are measured where all of them run this together: on a cluster with --distributed, elsewhere
    with --coordinator, --processes and --process. The first one prints.
    """
    from conduit_jax.sharding.network import joined
    from conduit_jax.sharding.profile_cache import cache_folder, cached_profile

    if distributed or any(one is not None for one in (coordinator, processes, process)):
        joined(coordinator, processes, process)
    topology = cached_profile(refresh=refresh)
    if _is_another(topology):
        return
    if as_json:
        click.echo(json.dumps(topology.as_dict(), indent=1))
    elif not quiet:
        _print_topology(topology)
        click.echo(f"kept in {cache_folder()}; measured anew with --refresh")


def _is_another(topology: Any) -> bool:
    """Whether this process is one of several and not the first."""
    if topology.nodes == 1:
        return False
    import jax

    return jax.process_index() > 0


def _print_topology(topology: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from conduit_jax.sharding.network import ALONE
    from conduit_jax.sharding.plans import duration, size

    sizes = sorted({point for link in topology.links.values() for point in link.bytes})
    table = Table(
        "link",
        *(size(point) for point in sizes),
        "at the largest",
        "spread",
        title=f"{topology.name}, {topology.source}",
    )
    network = {"network": topology.network} if topology.network else {}
    for name, link in {**topology.links, **network}.items():
        cells = [duration(link.transfer_s(point)) if point in link.bytes else "-" for point in sizes]
        fresh = link.transfer_s(link.bytes[-1], fresh=True)
        rate = (
            "less than the noise"
            if fresh < 1e-8
            else f"{size(link.bytes_per_s(link.bytes[-1]))}/s, fresh {size(link.bytes[-1] / fresh)}/s"
        )
        table.add_row(name, *cells, rate, f"{100 * link.spread[-1]:.0f} %" if link.spread else "-")
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file or a pipe has no width to keep to
    console.print(table)
    for kind in topology.contention:
        alone = {point: topology.links[kind].transfer_s(point) for point in topology.links[kind].bytes}
        times = [
            f"{1 + topology.slowed_s(kind, point, own) / own:.3g} at {size(point)}" for point, own in alone.items()
        ]
        console.print(f"{kind}, all at once, times the time of one: {', '.join(times)}", highlight=False)
    for tier, amount in {"each device": min(topology.device_memory_bytes), **topology.host_memory_bytes}.items():
        console.print(f"memory of {tier}: {size(amount)}", highlight=False)
    if topology.network is None:
        console.print(f"network: {ALONE}", highlight=False, soft_wrap=True)
    for tier, reason in topology.unavailable.items():
        console.print(f"not offered: {tier}: {reason}", highlight=False, soft_wrap=True)


def _this_machine() -> Any:
    from conduit_jax.sharding.profile_cache import cached_profile

    return cached_profile()


def ranks_of(text: str, count: int) -> tuple[int, ...]:
    """Read ``"0,2,5"``, ``"0-7"`` or ``"all"`` as ranks below ``count``."""
    if text == "all":
        return tuple(range(count))
    ranks: list[int] = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", word)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            refuse(ConfigError, "--learners cannot be read.", got=repr(text), want="ranks: 0, 0,2,5, 0-7 or all")
        ranks += range(int(found[1]), int(found[2] or found[1]) + 1)
    return tuple(ranks)


def leaves_of(words: tuple[str, ...], item_bytes: int | None) -> dict[str, int]:
    """Read ``NAME=BYTES`` words as bytes by leaf; ``item_bytes``, where it was said too, has to be their sum."""
    leaves = _amounts("--leaf", words, "NAME=BYTES, for instance image=28K")
    if not leaves and item_bytes is None:
        refuse(
            ConfigError, "How large an item is was not said.", got="neither", want="--item BYTES, or --leaf NAME=BYTES"
        )
    return leaves


def limits_of(words: tuple[str, ...]) -> dict[str, int]:
    """Read ``TIER=BYTES`` words as bytes by tier; 0 rules a tier out."""
    return _amounts("--limit", words, "TIER=BYTES, for instance device=16G")


def _amounts(option: str, words: tuple[str, ...], want: str) -> dict[str, int]:
    """Read ``NAME=BYTES`` words as bytes by name."""
    amounts: dict[str, int] = {}
    for word in words:
        name, equals, amount = word.partition("=")
        if not equals or not name:
            refuse(ConfigError, f"{option} cannot be read.", got=repr(word), want=want)
        if name in amounts:
            refuse(ConfigError, f"{option} was given twice for one name.", got=repr(name), want="each name once")
        is_none = option == "--limit" and amount.strip() == "0"
        amounts[name] = 0 if is_none else AMOUNT.convert(amount, None, None)
    return amounts


def _list(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from conduit_jax.sharding.topology import load_topology, shipped_topologies

    for name in shipped_topologies():
        topology = load_topology(name)
        click.echo(
            f"{name:<24} {topology.nodes} x {topology.devices} devices of {topology.device_memory_bytes[0] / 1e9:.0f} GB"
        )
    ctx.exit()
