"""What serving engines do with a cut model, and which key dims are faster."""
