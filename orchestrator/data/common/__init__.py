"""What every part of the data plane uses: the settings of a stream, limits of its processes, user code."""
