"""Pages of the vault."""

from django.urls import path

from evidence import views
from evidence.pages import decisions, handing_out
from evidence.pages.steps import TWO_PEOPLE

urlpatterns = [
    path("vault", views.vault, name="vault"),
    path("vault/open", decisions.open_dossier, name="open_dossier"),
    path("vault/objects/<str:sha256>", views.stored_object, name="stored_object"),
    path("vault/<int:dossier_id>", views.dossier, name="dossier"),
    path("vault/<int:dossier_id>/items", views.dossier_items, name="dossier_items"),
    path("vault/<int:dossier_id>/items/<int:item_id>", views.item, name="dossier_item"),
    path(
        "vault/<int:dossier_id>/items/<int:item_id>/read", decisions.read_checkpoint, name="read_checkpoint"
    ),
    path("vault/<int:dossier_id>/custody", views.custody, name="custody"),
    path("vault/<int:dossier_id>/bag", handing_out.bag, name="take_bag"),
    path("vault/<int:dossier_id>/objects/<int:object_id>", handing_out.stored_object, name="take_object"),
    path("vault/<int:dossier_id>/close", decisions.close, name="close_dossier"),
    path("vault/<int:dossier_id>/extend", decisions.extend, name="extend_retention"),
    *[
        path(f"vault/<int:dossier_id>/{name}", decisions.two_person_step, {"name": name}, name=name)
        for name in TWO_PEOPLE
    ],
]
