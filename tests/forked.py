"""Processes of tests that have torch and the rest imported when they begin: they are forked from a server,
which a process of tests starts once.
"""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preloaded"])
