"""From a model to a cut: inspect, calibrate, plan, prune."""
