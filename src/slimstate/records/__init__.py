"""What was measured, as types that write and read themselves: the only thing that passes from measuring to drawing."""
