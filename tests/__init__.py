"""The test suite, a mirror of the package."""
