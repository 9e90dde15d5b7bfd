"""Checks of the files in deploy/ against the schemas of Kubernetes and Helm, for `make manifests`."""
