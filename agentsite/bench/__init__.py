"""What `manage.py bench` measures, each in a throwaway database beside the configured one."""
