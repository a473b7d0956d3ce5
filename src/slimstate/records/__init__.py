"""What was measured, as types that write and read themselves."""
