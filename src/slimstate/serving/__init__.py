"""What engines make of a cut model, and which key dims pay."""
