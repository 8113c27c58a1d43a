"""A critic behind the service: checked, journalled, applied, answered, and brought back after a crash."""
