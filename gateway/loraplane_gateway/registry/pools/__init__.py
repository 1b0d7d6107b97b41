"""What the operator reports about pools."""
