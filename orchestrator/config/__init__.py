"""The configuration: YAML and `key=value` overrides become one frozen `JobConfig`."""
