"""What the server of the forked processes imports before it forks the first."""

from importlib import import_module

from orchestrator.paused_gc import paused_gc

with paused_gc():
    for _module in (
        "tests.trainer.member",
        "tests.trainer.killable",
        "orchestrator.data.feed.local_feed",
        "orchestrator.launch.member.remote_membership",
        "orchestrator.torchrun.run",
    ):
        import_module(_module)
