"""The configuration: YAML and `key=value` words become one frozen `JobConfig`."""
