"""``sglang-plt tree``: shows the prefixes that a running server holds, how probable they are, and their clusters."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from sglang_plt.cli.errors import UserError
from sglang_plt.client import Client, RequestError

NAME = "tree"
HELP = "Show the tree of prefixes of a running server: tiers, tokens, probabilities and clusters, as text or HTML."

DEFAULT_URL = "http://127.0.0.1:30000"
TOKENS_PER_ROW = 48
_TRIES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that needs nothing else to FILE")
    parser.add_argument("--text", action="store_true", help="print it as text (the default without --html)")
    parser.add_argument(
        "--tokens", action="store_true", help="also show what the prefixes say; without it no content leaves the server"
    )
    parser.add_argument(
        "--max-rows", metavar="N", type=int, default=2000, help="rows to show, the largest first (default: 2000)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's --api-key")
    parser.add_argument("--admin-api-key", metavar="KEY", help="the server's --admin-api-key, where it has one")


def run(args: argparse.Namespace) -> int:
    from sglang_plt.cli.tree_html import page
    from sglang_plt.cli.tree_text import lines

    if not 1 <= args.max_rows <= 100_000:
        raise UserError(f"--max-rows={args.max_rows} must lie in 1..100000")
    if not args.url.startswith(("http://", "https://")):
        raise UserError(f"--url={args.url} must begin with http:// or https://, for example {DEFAULT_URL}")
    if args.html is not None and not args.html.absolute().parent.is_dir():
        raise UserError(f"--html={args.html}: {args.html.absolute().parent} is not a directory")
    trees = fetch(args.url, args.max_rows, args.tokens, args.api_key, args.admin_api_key)
    if args.html is not None:
        try:
            args.html.write_text(page(args.url, trees), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html={args.html} cannot be written: {error.strerror}") from error
        print(f"tree: wrote {args.html}", file=sys.stderr)
    if args.text or args.html is None:
        try:
            for line in lines(args.url, trees):
                print(line)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has seen enough; nothing is left to be flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def fetch(
    url: str, max_rows: int, tokens: bool = False, api_key: str | None = None, admin_api_key: str | None = None
) -> list[dict[str, Any]]:
    """The snapshots of a server, one a data-parallel replica (see ``sglang_plt.snapshot``).

    With ``tokens`` a row whose content is shown has ``text`` too, where the server has a tokenizer.

    Raises:
        UserError: nothing answers, a key is missing, or the server does not run this cache.
    """
    url = url.rstrip("/")
    server, admin = Client(url, api_key), Client(url, admin_api_key or api_key)
    try:
        info = server.get_json("/server_info")
        if not isinstance(info, dict) or "internal_states" not in info:
            raise UserError(f"--url={url} is not an SGLang server: its /server_info has no internal_states")
        if info.get("radix_cache_backend") != "plt":
            raise UserError(
                f"the server at {url} does not run this cache (its --radix-cache is "
                f"{info.get('radix_cache_backend') or 'not set'}); start it with --radix-cache plt"
            )
        wanted = {"plt_tree": max_rows, "plt_tree_tokens": TOKENS_PER_ROW if tokens else 0}
        for _ in range(_TRIES):  # another reader of /server_info may take what was asked for
            if not all(admin.post_json("/set_internal_state", {"server_args": wanted})):
                raise UserError(
                    f"the server at {url} has another version of sglang-plt, which shows no tree; update it"
                )
            states = server.get_json("/server_info")["internal_states"]
            trees = [state["plt_tree"] for state in states if "plt_tree" in state]
            if states and len(trees) == len(states):
                break
        else:
            raise UserError(f"the server at {url} gave no tree: something else reads its /server_info all the time")
        if tokens:
            _add_text(server, trees)
        return trees
    except RequestError as error:
        if error.status in (401, 403):
            raise UserError(f"the server at {url} refuses: give --api-key or --admin-api-key") from error
        raise UserError(f"{url} is not a server with this cache, or cannot tell: {error}") from error
    except ValueError as error:
        raise UserError(f"--url={url} is not an SGLang server: its answer is not JSON") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"nothing answers at {url} ({reason}); start a server there, or give --url") from error


def _add_text(server: Client, trees: list[dict[str, Any]]) -> None:
    rows = [row for tree in trees for row in tree["nodes"] if row.get("tokens")]
    if not rows:
        return
    request = {"model": "", "tokens": [row["tokens"] for row in rows], "skip_special_tokens": False}
    try:
        texts = server.post_json("/v1/detokenize", request)["text"]
    except RequestError:
        return  # it runs without a tokenizer: the ids are shown
    for row, text in zip(rows, texts, strict=True):
        row["text"] = text
