"""uvicorn around the page, on this machine only unless asked otherwise."""

from __future__ import annotations

import ipaddress
import threading
import time
import webbrowser
from collections.abc import Callable

import uvicorn

from keepcover.errors import InputError
from keepcover.explore.answers import Explorer
from keepcover.explore.app import LOOPBACK, create_app, log
from keepcover.web.server import BACKLOG, Announcing, Protocol, bind


def run(
    explorer: Explorer,
    *,
    tell: Callable[[str], None],
    host: str = "127.0.0.1",
    port: int = 7860,
    open_page: bool = True,
) -> None:
    """Show the page until interrupted. Port 0 takes a free one; ``tell`` is told the address once it answers."""
    with bind(host, port) as listener:
        bound, number = listener.getsockname()[:2]
        local = ipaddress.ip_address(bound).is_loopback
        name = f"[{bound}]" if ":" in bound else bound
        if not local:
            log.warning("open to the network on %s: every machine that reaches this port can use the model", name)
        address = f"http://{'127.0.0.1' if bound == '0.0.0.0' else name}:{number}/"
        app = create_app(explorer, LOOPBACK if local else None)
        config = uvicorn.Config(
            app, http=Protocol, log_level="warning", access_log=False, server_header=False, ws="none", backlog=BACKLOG
        )
        server = Announcing(config, lambda: _announce(address, open_page, tell))
        if explorer.subject.cheap:
            threading.Thread(target=_warm, args=(explorer, server), daemon=True).start()
        server.run(sockets=[listener])


def _announce(address: str, open_page: bool, tell: Callable[[str], None]) -> None:
    tell(address)
    if open_page:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def _warm(explorer: Explorer, server: uvicorn.Server) -> None:
    """Calibrate what the controls offer before it is asked for: the usual alpha first, cheap draws first."""
    lineup = explorer.lineup
    usual = lineup.default[0]
    for alpha in sorted(lineup.alphas, key=lambda a: a != usual):
        for draws in lineup.draws:
            for contender in lineup.contenders:
                while explorer.curves.busy and not server.should_exit:  # the page waits for those
                    time.sleep(0.5)
                if server.should_exit:
                    return
                try:
                    lineup.predictor(contender.key, alpha, draws)
                except InputError:
                    return  # the page will say it when it asks
