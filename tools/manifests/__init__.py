"""Whether Kubernetes and Helm accept the files in deploy/: `make manifests` asks their own schemas."""
