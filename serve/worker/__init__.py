"""The worker role: owns one device, runs the forward pass and samples."""
