"""Win back what a cut costs: train each cut layer to give what the uncut one gave, one layer in memory at a time."""
