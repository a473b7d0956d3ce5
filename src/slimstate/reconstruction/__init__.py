"""Train each cut layer to match the output of the uncut layer, with one layer in memory at a time."""
