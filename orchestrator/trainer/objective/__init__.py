"""What is trained for: the loss and the metrics of a micro-batch, built in or from a plug-in."""
