"""The tensor files and manifests of a resume point, without torch."""
