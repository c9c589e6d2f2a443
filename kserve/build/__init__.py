"""From a wish to a finished build: plan, lease, worker."""
