"""One file per adjoint pair."""
