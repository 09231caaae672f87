"""What the controller decides, as pure functions of what it has been told."""
