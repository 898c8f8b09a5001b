from django.apps import AppConfig


class ApprovalsConfig(AppConfig):
    name = "approvals"
    verbose_name = "Approvals"

    def ready(self) -> None:
        # The one place where the two apps meet inside a transaction: the log asks this gate about tool calls.
        from approvals.gate import ApprovalGate
        from streams import gate

        gate.install(ApprovalGate())
