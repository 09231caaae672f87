"""What a controller does in Kubernetes."""
