"""Time models at every key dim, and what cutting them costs: mixers, whole models, decoding, calibration."""
