"""Running models: the stock class on a device, hooks into its layers, models larger than the device."""
