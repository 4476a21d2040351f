"""A launch on Ray: the driver on the cluster, the worker, and the membership between them."""
