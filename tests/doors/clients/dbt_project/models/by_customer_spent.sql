{{ config(materialized='materialized_view') }}
select customer, count(*) as n, sum(amount) as total
from {{ source('service', 'orders') }}
group by customer
