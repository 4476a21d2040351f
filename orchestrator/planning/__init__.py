"""What to do, decided in pure integers: order, batches, schedule, identity, digests, and whether a point may
be resumed. Knows no Ray and no torch.
"""
