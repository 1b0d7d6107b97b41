"""From a source to a validated or rejected version, in worker processes."""
