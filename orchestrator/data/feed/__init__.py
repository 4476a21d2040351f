"""Delivery of samples to ranks: the feeder on Ray Data, and a feed for processes without Ray."""
