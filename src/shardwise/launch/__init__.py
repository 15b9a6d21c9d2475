"""Starting, joining and watching the ranks of a job."""
