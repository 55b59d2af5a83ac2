"""The processes of a pod, how they find each other, and how they leave."""
