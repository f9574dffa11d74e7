{{ config(materialized='view', tags=['plain_view']) }}
select * from {{ source('service', 'orders') }} where amount > 100
