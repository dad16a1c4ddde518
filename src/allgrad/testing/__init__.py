"""Run code on real ranks and check its gradients."""
