"""The steps before an attempt starts: the claim, the preview of what it would do, and its report."""
