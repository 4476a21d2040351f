"""The command `dashboard`. Only this command loads a web server, and only when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.shared import Json, app, print_json, print_lines, say


@app.command()
def dashboard(
    storage: Annotated[
        str, typer.Argument(help="the folder, or bucket's URI, in which runs lie, or one run's own")
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free")] = 0,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="address to listen on; another than this machine's own is reached by others"
        ),
    ] = "127.0.0.1",
    json: Json = False,
    open_page: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
    until_eof: Annotated[bool, typer.Option("--until-eof", hidden=True)] = False,
) -> None:
    """Serve a page that shows and steers runs. Prints its link. Shows every run of a folder, alive or not."""
    from orchestrator.inspect.dashboard.auth import is_loopback
    from orchestrator.inspect.dashboard.serve import serve

    if not is_loopback(host):
        say(
            f"warning: {host} is reached from other machines, and its connections are not encrypted: anybody "
            "who has the link, or reads along, can stop runs; an ssh tunnel needs no --host"
        )

    def announce(link: str) -> None:
        print_json({"link": link}) if json else print_lines([link])
        if open_page:
            import webbrowser

            webbrowser.open(link)

    serve(storage, host, port, announce, until_eof)
