"""What ``allgrad demo`` trains: two towers that match handwritten digits and captions."""
