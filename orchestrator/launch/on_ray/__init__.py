"""A launch on Ray: the driver on the cluster, and the worker."""
