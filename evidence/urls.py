"""Pages of the vault."""

from django.urls import path

from evidence import views

urlpatterns = [
    path("vault", views.vault, name="vault"),
    path("vault/<int:dossier_id>", views.dossier, name="dossier"),
    path("vault/<int:dossier_id>/items", views.dossier_items, name="dossier_items"),
]
