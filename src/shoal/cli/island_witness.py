"""`shoal islands witness`: a voter without weights or data, so that one of two islands goes on."""

from __future__ import annotations

import os
import time

import typer

from shoal.base.errors import ConfigError

AT = typer.Argument(
    ..., metavar="AT", help="The islands' addresses, as islands.at: HOST:PORT,HOST:PORT."
)
LISTEN = typer.Option(
    ..., "--listen", metavar="HOST:PORT", help="This machine's address, which the islands reach."
)
NUMBER = typer.Option(0, "--number", min=0, help="Of this witness, if the run has several.")
KEY = typer.Option("", "--key", help="This witness's own key, as islands.key.")
KEYS = typer.Option("", "--keys", help="The keys that may join, as islands.keys.")


def witness(
    at: str = AT, listen: str = LISTEN, number: int = NUMBER, key: str = KEY, keys: str = KEYS
) -> None:
    """Vote for a run of islands that come and go, without weights or data.

    With two islands and a witness, each island can go on without the other one (islands.least=1).
    Start it on a third machine; it joins, and ends with the run. SHOAL_TOKEN is that of the run.
    """
    from shoal.base.layouts.changing_members import list_addresses
    from shoal.base.layouts.island_options import is_address
    from shoal.fabric.islands.member_links import MemberLinks
    from shoal.islands.changing.witness import Witness
    from shoal.islands.membership.committed_turn import FIRST_WITNESS, Seat
    from shoal.launch.stop_requests import StopSignals
    from shoal.wire.member_keys import open_member_keys
    from shoal.wire.run_token import read_token

    addresses = list_addresses(at)
    for what, one in [("AT", one) for one in addresses.values()] + [("--listen", listen)]:
        if not is_address(one):
            raise ConfigError(
                f"{what} = {one}: HOST:PORT is wanted; try: shoal islands witness "
                f"10.0.0.1:29400,10.0.0.2:29400 --listen 10.0.0.3:29400"
            )

    def tell(line: str) -> None:
        typer.echo(f"witness: {line}")

    seat = Seat(FIRST_WITNESS + number, int(time.time() * 1000))
    voter = Witness(seat, tuple(addresses), tell)
    links = MemberLinks(
        *(seat.name, seat.boot, {**addresses, seat.name: listen}, read_token(os.environ)),
        *(voter.on_message, voter.provide, tell),
        open_member_keys(key, keys, seat.name, tell),
    )
    tell(f"listens at {listen}; waits for the islands at {at}")
    with StopSignals() as stop:
        has_ended = voter.run(links, lambda: stop.first is not None)
    links.close()
    tell("the run has ended" if has_ended else "stopped; the islands go on without it")
