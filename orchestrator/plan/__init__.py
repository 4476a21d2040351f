"""What to do, decided in pure integers: order, batches, schedule, identity, resume and lineage. Knows no Ray
and no torch.
"""

from orchestrator.stage import make_callable

make_callable(__name__)
